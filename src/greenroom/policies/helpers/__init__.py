"""What several policies are made of: lists, buckets, bit sets, pools and scans over arrays."""
