"""Tests of quantised safetensors."""
