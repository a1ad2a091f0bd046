"""Alembic's folder: `env.py` runs the revisions of `versions/`, oldest first.

A released revision is never edited; a change is a new file whose `down_revision` is the newest one so far.
"""
