"""What a command shows in the terminal, and the files that it writes."""
