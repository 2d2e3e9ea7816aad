"""Records: Arrow tables, the dicts that per-record functions see, and the types between them."""
