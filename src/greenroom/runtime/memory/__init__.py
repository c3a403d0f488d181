"""Memory of this machine and process: how much there is, in which pages, at which node."""
