"""Data structures that policies share: lists, buckets, bit sets, pools and scans."""
