"""Models without their experts: built on the meta device, their dense parts loaded.

architectures   the architectures that are served, and their classes
skeleton        a model on the meta device, and loading it; dense: matrices that stay encoded
implementation  the experts implementation that models are built with
reference       reference weights, by transformers' own loading code
"""
