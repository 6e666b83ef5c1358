"""What a run leaves on disk: the schema, the writer with its lock and seal, the reader, and how runs are found."""
