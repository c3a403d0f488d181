"""Tests of `deploy/ray.py` on a cluster of several nodes in processes of this machine."""
