"""The live page of a server, which also plays recordings: its files, and the frames it draws."""
