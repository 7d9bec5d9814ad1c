"""Collaborative training over the internet: peers that come and go average what they learned."""
