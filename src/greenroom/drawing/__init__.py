"""The map of layers and experts that the live page and the reports draw: files and frames."""
