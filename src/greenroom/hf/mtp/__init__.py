"""MTP layers: further layers of some checkpoints that predict the token after the next one."""
