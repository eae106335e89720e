"""Tables from files: readers, the guess of a schema, and the check of a table against one."""
