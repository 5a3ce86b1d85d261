"""Targets and drafter ranks in other processes, on one or many hosts: thin shells over the classes that run in one."""

from paceline.models.imports import import_models

import_models()  # first of all in a process that Ray starts; in a driver Transformers is there, and nothing is done
