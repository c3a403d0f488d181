"""Data structures of eviction policies: lists, buckets, bit sets, pools and scans."""
