"""Check what a model or a configuration really runs in low precision (`gnmr.audit`), and compare two sides' lists.

    audit            the findings of an audit, its verdict, and the pass that it measures
    seen_operands    what the GEMMs of that pass read, and why it is poor
    sides            which linears a trainer and a rollout engine treat differently, by their lists of names

The room reads models and lists (`gnmr.measure.in_force`, `gnmr.plan.lists`), and changes neither. It does not know runs
and checkpoints, which are the lab's.
"""
