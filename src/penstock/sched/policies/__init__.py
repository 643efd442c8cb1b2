"""The scheduler's policies, one for each seam: gate, order, budget, reserve, victim, predictor, eviction."""
