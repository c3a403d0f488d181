"""Graphics cards from vendors' data sheets, and the speed of a machine that has one."""
