"""From a configuration, a target's shape and a data set to concrete settings, before anything large is loaded."""
