"""Evaluation: held-out loss by domain, and fine-tuning on labelled tasks."""
