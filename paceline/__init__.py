"""Paceline trains DFlash drafters: small block-diffusion models that make a large language model decode faster.

`paceline.api` has every verb of the command line as a function.
"""

__version__ = "0.1.0"
