"""Variants of a model whose experts differ: adapters, and how they share the expert cache.

adapter.py    read an adapter's folder, and check that it fits the model
catalog.py    one catalog of the experts of all variants, in which equal experts are one
routing.py    from the experts that a router chose to those of each token's variant
predictor.py  the same for predicted experts
"""
