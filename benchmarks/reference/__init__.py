"""The reference drafter: its data, its training and what it is worth, rebuilt by `make reference`."""
