"""Machine profiles and speed estimates for the commands plan, tune and doctor."""
