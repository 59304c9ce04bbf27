"""Stored runs and answers, as the scripts of this folder read and write them."""
