"""What several APIs have in common."""
