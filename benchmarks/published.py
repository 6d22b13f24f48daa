"""Figures of the five papers as they printed them, to stand beside ours.

Lin et al., NeurIPS 2024 (pathwise probes, warm starts, budgets); Potapczynski et al., ICML 2021 (randomised truncation);
Shoham and Avron (kernels of finitely many features); Evans and Nair, ICML 2018 (quadruply stochastic). Tatzel et al.
(Laplace's method) print figures and no table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinRow:
    """A row of tables 2 to 6 of Lin et al.: means over ten splits after 100 steps, solved to a tolerance of 0.01.

    Attributes:
        rmse, log_likelihood: on the held-out rows; None where they stopped after a day.
        minutes: total, on an A100; 1,440 where they stopped.
    """

    rmse: float | None
    log_likelihood: float | None
    minutes: float


#: The order of the rows in these tables: probes and start.
LIN_VARIANTS = ("standard, cold", "pathwise, cold", "standard, warm", "pathwise, warm")


def _rows(*figures: tuple[float | None, float | None, float]) -> dict[str, LinRow]:
    return {name: LinRow(*row) for name, row in zip(LIN_VARIANTS, figures, strict=True)}


#: Tables 2 to 6: data set -> solver -> probes and start -> row.
LIN: dict[str, dict[str, dict[str, LinRow]]] = {
    "pol": {
        "CG": _rows(
            (0.0750, 1.2682, 4.8263), (0.0754, 1.2716, 3.9567), (0.0750, 1.2681, 2.2844), (0.0758, 1.2666, 2.4652)
        ),
        "AP": _rows(
            (0.0750, 1.2682, 493.05), (0.0754, 1.2715, 44.006), (0.0750, 1.2681, 27.915), (0.0758, 1.2666, 3.8962)
        ),
        "SGD": _rows(
            (0.0750, 1.2681, 138.63), (0.0754, 1.2708, 73.546), (0.0750, 1.2682, 26.483), (0.0757, 1.2678, 17.938)
        ),
    },
    "elevators": {
        "CG": _rows(
            (0.3550, -0.3856, 1.5811), (0.3562, -0.3868, 1.4940), (0.3550, -0.3856, 1.0308), (0.3558, -0.3856, 0.9977)
        ),
        "AP": _rows(
            (0.3550, -0.3856, 77.787), (0.3562, -0.3868, 36.346), (0.3550, -0.3856, 1.6658), (0.3558, -0.3856, 1.2065)
        ),
        "SGD": _rows(
            (0.3550, -0.3855, 5.5408), (0.3562, -0.3868, 4.5758), (0.3550, -0.3855, 1.2221), (0.3558, -0.3854, 1.1437)
        ),
    },
    "bike": {
        "CG": _rows(
            (0.0326, 2.1500, 5.0797), (0.0326, 2.0674, 4.4147), (0.0327, 2.1508, 2.7392), (0.0329, 2.0615, 3.0658)
        ),
        "AP": _rows(
            (0.0326, 2.1504, 302.26), (0.0325, 2.0668, 35.081), (0.0326, 2.1503, 19.892), (0.0330, 2.0616, 5.4041)
        ),
        "SGD": _rows(
            (0.0326, 2.1535, 412.17), (0.0324, 2.0692, 156.24), (0.0327, 2.1524, 74.341), (0.0332, 2.0562, 64.145)
        ),
    },
    "protein": {
        "CG": _rows(
            (0.5024, -0.5871, 29.849), (0.4909, -0.6210, 19.984), (0.5026, -0.5871, 11.542), (0.4912, -0.6214, 13.744)
        ),
        "AP": _rows(
            (0.5024, -0.5871, 130.93), (0.4907, -0.6214, 55.790), (0.5027, -0.5871, 16.425), (0.4912, -0.6213, 12.341)
        ),
        "SGD": _rows(
            (0.5026, -0.5871, 75.205), (0.4894, -0.6268, 24.030), (0.5027, -0.5878, 11.226), (0.4911, -0.6217, 11.939)
        ),
    },
    "keggdirected": {
        "CG": _rows(
            (0.0837, 1.0818, 27.974), (0.0837, 1.0818, 26.362), (0.0837, 1.0816, 12.754), (0.0836, 1.0819, 12.998)
        ),
        "AP": _rows((None, None, 1440.0), (0.0837, 1.0820, 491.41), (0.0837, 1.0818, 211.28), (0.0836, 1.0817, 14.013)),
        "SGD": _rows(
            (0.0837, 1.0816, 620.07), (0.0837, 1.0822, 411.58), (0.0837, 1.0821, 168.38), (0.0839, 1.0725, 58.679)
        ),
    },
}
#: Table 1: solver -> average speed-up in time over the five data sets against "standard, cold", in the order of
#: LIN_VARIANTS. The printed total times of AP's middle rows are swapped there; tables 2 to 6 and these averages are not.
LIN_SPEED_UPS: dict[str, tuple[float, float, float, float]] = {
    "CG": (1.0, 1.2, 2.1, 1.9),
    "AP": (1.0, 5.4, 18.9, 72.1),
    "SGD": (1.0, 2.1, 5.1, 7.2),
}
#: Tables 7 to 10, pathwise probes and ten epochs a step: data set -> solver -> mean residual norms of targets and
#: probes, cold and warm.
LIN_BUDGETS: dict[str, dict[str, tuple[tuple[float, float], tuple[float, float]]]] = {
    "3droad": {
        "CG": ((0.9815, 0.9174), (0.6530, 0.9003)),
        "AP": ((0.0950, 0.0541), (0.0469, 0.0651)),
        "SGD": ((0.1130, 0.0633), (0.0561, 0.0797)),
    },
    "song": {
        "CG": ((1.6528, 1.6356), (0.3793, 0.4147)),
        "AP": ((0.0421, 0.0499), (0.0085, 0.0125)),
        "SGD": ((0.0688, 0.0834), (0.0100, 0.0117)),
    },
    "buzz": {
        "CG": ((1.9248, 3.0380), (2.1218, 1.6968)),
        "AP": ((0.0516, 0.0851), (0.0143, 0.0263)),
        "SGD": ((0.2252, 0.3906), (0.0767, 0.1544)),
    },
    "houseelectric": {
        "CG": ((0.7495, 1.4922), (0.6063, 1.1958)),
        "AP": ((0.0215, 0.0598), (0.0104, 0.0409)),
        "SGD": ((0.0409, 0.1645), (0.0321, 0.1230)),
    },
}
#: Potapczynski et al., their table: data set -> method -> RMSE and NLL, means over three splits.
TRUNCATION: dict[str, dict[str, tuple[float, float]]] = {
    "pol": {
        "cholesky": (0.112, -0.464),
        "cg": (0.119, -0.354),
        "rr-cg": (0.112, -0.458),
        "rff": (0.106, -0.159),
        "svgp": (0.150, -0.442),
    },
    "elevators": {
        "cholesky": (0.360, 0.425),
        "cg": (0.360, 0.429),
        "rr-cg": (0.360, 0.425),
        "rff": (0.365, 0.780),
        "svgp": (0.376, 0.442),
    },
    "bike": {
        "cholesky": (0.035, -0.984),
        "cg": (0.040, -0.971),
        "rr-cg": (0.035, -0.982),
        "rff": (0.063, 0.099),
        "svgp": (0.045, -1.514),
    },
    "kin40k": {"cg": (0.093, 0.468), "rr-cg": (0.091, 0.449), "rff": (0.074, 1.407), "svgp": (0.152, -0.410)},
    "protein": {"cg": (0.541, 0.934), "rr-cg": (0.541, 0.934), "rff": (0.547, 1.163), "svgp": (0.664, 1.014)},
    "keggdirected": {"cg": (0.195, 0.415), "rr-cg": (0.087, -0.884), "rff": (0.101, 6.311), "svgp": (0.088, -1.022)},
}
#: Shoham and Avron: methods in the order of their columns.
FEATURE_METHODS = ("minimax", "scgd", "svgp", "bsgd")
#: Network and linear kernel, targets centred but not scaled: data set -> batch size -> mean NLML of FEATURE_METHODS over
#: five splits.
FEATURE_NLML: dict[str, dict[int, tuple[float, float, float, float]]] = {
    "bike": {
        32: (-1.482, -1.454, -0.895, -1.167),
        64: (-1.378, -1.366, -0.644, -1.282),
        128: (-1.340, -1.358, -0.832, -1.311),
    },
    "elevators": {
        32: (-1.588, -1.530, -0.150, -1.125),
        64: (-1.523, -1.427, -0.152, -1.139),
        128: (-1.678, -1.399, 0.044, -1.173),
    },
    "keggdirected": {
        32: (-0.745, -0.740, -0.151, -0.688),
        64: (-0.780, -0.748, -0.126, -0.726),
        128: (-0.805, -0.778, -0.189, -0.763),
    },
    "kin40k": {
        32: (-1.713, -1.760, 0.792, -0.684),
        64: (-1.654, -1.682, 0.298, -0.952),
        128: (-1.590, -1.618, 0.003, -1.224),
    },
    "pol": {
        32: (2.128, 2.016, 1.643, 2.689),
        64: (2.206, 2.171, 1.610, 2.413),
        128: (2.215, 2.150, 1.583, 2.223),
    },
    "protein": {
        32: (0.392, 0.393, 0.848, 0.640),
        64: (0.325, 0.381, 0.659, 0.618),
        128: (0.289, 0.327, 0.709, 0.576),
    },
    "tamielectric": {
        32: (0.178, 0.179, 0.179, 0.179),
        64: (0.178, 0.178, 0.179, 0.179),
        128: (0.178, 0.178, 0.179, 0.179),
    },
}
#: The same at a batch of 128: test RMSE.
FEATURE_RMSE: dict[str, tuple[float, float, float, float]] = {
    "bike": (0.125, 0.123, 0.111, 0.056),
    "elevators": (0.110, 0.101, 0.250, 0.091),
    "keggdirected": (0.116, 0.118, 0.370, 0.123),
    "kin40k": (0.073, 0.071, 0.283, 0.078),
    "pol": (2.469, 2.413, 2.537, 2.642),
    "protein": (0.435, 0.436, 0.513, 0.461),
    "tamielectric": (0.290, 0.289, 0.289, 0.289),
}
#: Evans and Nair, tables 2 (random features, SVGP with 512 inducing points) and 3 (all training rows as inducing points):
#: data set -> method -> RMSE (raw units, five splits) and MNLP (standardised, first split).
QUADRUPLY: dict[str, dict[str, tuple[float, float]]] = {
    "kin40k": {"rff": (0.174, 0.135), "svgp": (0.247, 0.055), "inducing": (0.154, -0.348)},
    "protein": {"rff": (0.602, 1.34), "svgp": (0.542, 1.06), "inducing": (0.598, 1.157)},
    "keggdirected": {"rff": (0.135, -0.821), "svgp": (0.124, -0.953), "inducing": (0.124, -0.554)},
}
