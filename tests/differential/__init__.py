"""Two ways to the same result, compared on random inputs until a bound: `make soak`."""
