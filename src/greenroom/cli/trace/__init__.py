"""`greenroom trace`: one file a command."""
