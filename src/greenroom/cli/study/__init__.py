"""What `greenroom simulate` makes of its options: studies, systems, costs, the report."""
