"""The live screen in the terminal: the live page's numbers and map, beside the answer."""
