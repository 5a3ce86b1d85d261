"""Targets and drafter ranks in other processes, on one or many hosts: thin shells over the classes that run in one."""
