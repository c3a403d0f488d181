"""HTTP and the terminal chat: what people and their tools talk to."""
