"""What a run uses, recorded; and the predictor that is trained from such recordings."""
