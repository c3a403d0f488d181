"""MTP layers of checkpoints: they predict the token after the next one."""
