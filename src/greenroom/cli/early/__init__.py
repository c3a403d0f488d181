"""What a command does before anything heavy is imported."""
