"""History of a model's earlier runs, stored on disk: routing, measurements and settings."""
