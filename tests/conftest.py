import os

# As services.engine.assembly does, and for its reason; before any test imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
