"""A model in stages over several processes: each computes a part of the layers for the engines of all."""
