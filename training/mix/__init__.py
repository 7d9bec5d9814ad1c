"""`gristmill mix`: how much of each domain to train on."""
