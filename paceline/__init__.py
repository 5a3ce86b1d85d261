"""Paceline trains DFlash drafters: small block-diffusion models that make a large language model decode faster."""

__version__ = "0.1.0"
