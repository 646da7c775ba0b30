"""Fixtures of this room."""

from helpers.image_folders import write as write
