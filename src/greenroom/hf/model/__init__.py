"""Models without their experts: built on the meta device, then filled with other weights.

architectures   table of supported architectures, and the model class for a config
construction    models on the meta device
skeleton        a model on the meta device, and loading all its weights but the experts
dense           weight matrices that stay quantised in memory
implementation  registration of Greenroom's experts implementation with transformers
reference       weights as transformers' own code loads them, to compare with
"""
