"""Check what a model or a configuration really runs in low precision (`gnmr.audit`), and compare two sides' lists."""
