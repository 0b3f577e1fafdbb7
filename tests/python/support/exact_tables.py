"""Frequency tables by their formulas in 60 digits, implemented independently of the package."""

from mpmath import ceil, floor, fprod, fsum, log, mp, mpf, nint, pi

mp.dps = 60


class ExactTable:
    """cumulative_scale, inv_freq and turns for the arguments of ``mrrope.frequency_table``."""

    def __init__(self, method, *, rotary_dim, base, original_max_position, scale=1.0, alpha=1.0, beta=32.0, bounds=None,
                 power=None, factors=None):  # fmt: skip
        self.dim, self.base, self.length, self.scale = rotary_dim, mpf(base), mpf(original_max_position), mpf(scale)
        self.alpha, self.beta = mpf(alpha), mpf(beta)
        self.has_bounds, self.bounds = bounds is not None, bounds or (self.bound(beta, floor), self.bound(alpha, ceil))
        self.power = {"mrrope_uni": 0, "mrrope_pro": 1}.get(method, power)
        self.factors = [mpf(factor) for factor in factors or []]
        pairs = range(rotary_dim // 2)
        scale_of = getattr(self, method.removesuffix("_uni").removesuffix("_pro").removesuffix("_pow"))
        self.cumulative_scale = [scale_of(i) for i in pairs]
        self.inv_freq = [self.theta(i) / scale for i, scale in enumerate(self.cumulative_scale)]
        self.turns = [int(nint(frequency / (2 * pi) * 2**64)) % 2**64 for frequency in self.inv_freq]

    def theta(self, i):
        return self.base ** (mpf(-2 * i) / self.dim)

    def bound(self, rotations, rounded):
        pair = self.dim * log(self.length / (rotations * 2 * pi)) / (2 * log(self.base))
        return int(min(max(rounded(pair), 0), self.dim - 1))

    def rope(self, i):
        return mpf(1)

    def pi(self, i):
        return self.scale

    def ntk(self, i):
        return (self.scale ** (mpf(self.dim) / (self.dim - 2))) ** (mpf(2 * i) / self.dim)

    def yarn(self, i):
        low, high = self.bounds
        return self.mixed(mpf(i - low) / (high - low))

    def yarn_ratio(self, i):
        low, high = self.bounds
        alpha, beta = (self.rotations(high), self.rotations(low)) if self.has_bounds else (self.alpha, self.beta)
        return self.mixed((beta - self.rotations(i)) / (beta - alpha))

    llama3 = yarn_ratio

    def mrrope(self, i):
        low, high = self.bounds
        weights = {j: mpf(j - low + 1) ** mpf(self.power) for j in range(low, high)}
        total = fsum(weights.values())
        return fprod(self.scale ** (weight / total) for j, weight in weights.items() if j < i)

    def radix(self, i):
        return fprod(self.factors[:i])

    def longrope(self, i):
        return self.factors[i]

    def rotations(self, i):
        return self.length * self.theta(i) / (2 * pi)

    def mixed(self, ramp):
        ramp = min(max(ramp, mpf(0)), mpf(1))
        return 1 / (ramp / self.scale + 1 - ramp)
