"""Every operation on files, memory and threads fails in turn: `make faults`."""
