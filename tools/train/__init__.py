"""Trains `models/samovar-tiny` and its successors. `python -m tools.train prepare | train | eval --help`.

Stands alone: imports nothing of the services. Roles, in the order in which they use each other:
data/        text files -> token files (`Dataset`)
tasks/       a seed -> token rows with loss weights; no torch, so the data workers start fast
model.py     the architecture: layers, delta_rule, shape, checkpoint
trainer.py   the loop: schedule, stream, optimizer
evaluation/  the numbers of the model card
"""
