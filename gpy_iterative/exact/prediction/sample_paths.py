from torch import Tensor

from gpy_iterative.exact.prediction.blocks import product
from gpy_iterative.exact.prediction.joint_prior import checked_inputs, graph_for, joint_prior
from gpy_iterative.exact.probes import RandomFeatures, frequency_draws
from gpy_iterative.linear_operators.prior_parts import kernel_terms
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.spectral.densities import Draws
from gpy_iterative.training.snapshot import ModelSnapshot
from gpy_iterative.training.training_system import prior_at


class SamplePaths:
    """f_j(x) = m(x) + Phi(x) w_j + k(x, X)(v_y - v_j), j = 1..k, with the hyperparameters and data of their draw.

    Calls evaluate the same functions. Picklable if the model is. Wilson et al. 2021, "Pathwise conditioning of Gaussian
    processes"; Lin et al. 2024, section 3.
    """

    def __init__(
        self, snapshot: ModelSnapshot, features: RandomFeatures, draws: Draws, update: Tensor, products: KernelProducts
    ) -> None:
        self._snapshot, self._features = snapshot, features
        self._draws = frequency_draws(draws) | {"weights": draws["weights"][..., : update.shape[-1]]}
        self._update, self._products = update, products

    @property
    def num_paths(self) -> int:
        """The number k."""
        return self._update.shape[-1]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The functions at test inputs [*b, t, d]: [k, *b, t], or [k, *b, t, T] for T tasks; differentiable.

        ValueError for inputs that do not fit. Cost: t (n + 2 m) k multiply-adds for m frequencies.
        """
        with graph_for(inputs):
            model = self._snapshot.model_copy()
            points = checked_inputs(model.train_inputs, inputs)
            joint = joint_prior(model, points, self._update.shape[:-2], self._products)
            update = product(joint.test_train, self._update)
            distribution = prior_at(model, points)
            prior = self._features.prior_sample(kernel_terms(distribution.lazy_covariance_matrix), self._draws)
            values = joint.mean.unsqueeze(-1) + prior + update.reshape(*joint.mean.shape, self.num_paths)
            return values.to(joint.mean.dtype).movedim(-1, 0).unflatten(-1, distribution.event_shape)
