"""What a run leaves: the schema, the writer and the reader of a run folder."""
