"""``patch(model, method, scale="auto")``: a scale per sequence that follows its length."""
