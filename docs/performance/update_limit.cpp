// PPO's gradient step at CartPole's size, written for one processor and for nothing else: what
// docs/performance/update.py takes as the limit. Two networks of 4-64-64-k with tanh, minibatches of 256:
// forward, the clipped loss, backward, clipping by norm and Adam.
//
// Parameters lie one after another as torch's layers have them: weight [out][in], bias [out].
// Loops are plain; compile with -O3 -march=native -ffast-math, which turns them into vector
// instructions and tanhf into that of the vector library.

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int FRAMES = 256, INPUTS = 4, WIDTH = 64;
constexpr float CLIP = 0.2f, VALUE_WEIGHT = 0.5f, ENTROPY_WEIGHT = 0.01f, MAX_NORM = 0.5f;
constexpr float BETA_1 = 0.9f, BETA_2 = 0.999f, EPSILON = 1e-5f;

typedef float Lanes __attribute__((vector_size(32), aligned(4)));  // eight numbers at once
constexpr int LANES = 8;

Lanes& lanes(float* place) { return *reinterpret_cast<Lanes*>(place); }
const Lanes& lanes(const float* place) { return *reinterpret_cast<const Lanes*>(place); }

// out[rows][WIDTH] = a b + start, with b[depth][WIDTH] and the element a[row * down + k * along].
// Four rows and two vectors of columns stay in registers while k runs.
void multiply(const float* a, int down, int along, const float* b, const float* start, float* out,
              int rows, int depth) {
  for (int row = 0; row < rows; row += 4) {
    for (int column = 0; column < WIDTH; column += 2 * LANES) {
      Lanes sum[4][2];
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++)
          sum[i][j] = start ? lanes(start + column + j * LANES) : Lanes{};
      for (int k = 0; k < depth; k++) {
        const Lanes left = lanes(b + k * WIDTH + column);
        const Lanes right = lanes(b + k * WIDTH + column + LANES);
        for (int i = 0; i < 4; i++) {
          const float factor = a[(row + i) * down + k * along];
          sum[i][0] += factor * left;
          sum[i][1] += factor * right;
        }
      }
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++)
          lanes(out + (row + i) * WIDTH + column + j * LANES) = sum[i][j];
    }
  }
}

void transpose(const float* matrix, float* out, int rows, int columns) {
  for (int row = 0; row < rows; row++)
    for (int column = 0; column < columns; column++)
      out[column * rows + row] = matrix[row * columns + column];
}

void tanh_of(float* values) {
  for (int i = 0; i < FRAMES * WIDTH; i++) values[i] = 1.f - 2.f / (std::exp(2.f * values[i]) + 1.f);
}

// A gradient by the result of tanh becomes one by its input.
void through_tanh(float* gradient, const float* result) {
  for (int i = 0; i < FRAMES * WIDTH; i++) gradient[i] *= 1.f - result[i] * result[i];
}

void sum_rows(const float* matrix, float* out) {
  std::fill(out, out + WIDTH, 0.f);
  for (int row = 0; row < FRAMES; row++)
    for (int i = 0; i < WIDTH; i++) out[i] += matrix[row * WIDTH + i];
}

template <int OUTPUTS>
struct Network {
  static constexpr int W1 = 0, B1 = W1 + WIDTH * INPUTS, W2 = B1 + WIDTH, B2 = W2 + WIDTH * WIDTH;
  static constexpr int W3 = B2 + WIDTH, B3 = W3 + OUTPUTS * WIDTH, SIZE = B3 + OUTPUTS;

  float first[FRAMES * WIDTH], second[FRAMES * WIDTH];    // the hidden layers
  float by_first[FRAMES * WIDTH], by_second[FRAMES * WIDTH];  // and the gradients by them
  float turned[WIDTH * WIDTH];                            // a matrix, transposed

  void forward(const float* weights, const float* inputs, float* outputs) {
    transpose(weights + W1, turned, WIDTH, INPUTS);
    multiply(inputs, INPUTS, 1, turned, weights + B1, first, FRAMES, INPUTS);
    tanh_of(first);
    transpose(weights + W2, turned, WIDTH, WIDTH);
    multiply(first, WIDTH, 1, turned, weights + B2, second, FRAMES, WIDTH);
    tanh_of(second);
    for (int frame = 0; frame < FRAMES; frame++) {
      for (int output = 0; output < OUTPUTS; output++) {
        float sum = 0.f;
        for (int i = 0; i < WIDTH; i++)
          sum += second[frame * WIDTH + i] * weights[W3 + output * WIDTH + i];
        outputs[frame * OUTPUTS + output] = sum + weights[B3 + output];
      }
    }
  }

  // From the gradient by the outputs to that by the weights.
  void backward(const float* weights, const float* inputs, const float* by_outputs,
                float* gradient) {
    std::fill(gradient + W3, gradient + SIZE, 0.f);
    for (int frame = 0; frame < FRAMES; frame++) {
      float* by_hidden = by_second + frame * WIDTH;
      std::fill(by_hidden, by_hidden + WIDTH, 0.f);
      for (int output = 0; output < OUTPUTS; output++) {
        const float by_output = by_outputs[frame * OUTPUTS + output];
        gradient[B3 + output] += by_output;
        for (int i = 0; i < WIDTH; i++) {
          gradient[W3 + output * WIDTH + i] += by_output * second[frame * WIDTH + i];
          by_hidden[i] += by_output * weights[W3 + output * WIDTH + i];
        }
      }
    }
    through_tanh(by_second, second);
    multiply(by_second, 1, WIDTH, first, nullptr, gradient + W2, WIDTH, FRAMES);
    sum_rows(by_second, gradient + B2);
    multiply(by_second, WIDTH, 1, weights + W2, nullptr, by_first, FRAMES, WIDTH);
    through_tanh(by_first, first);
    float transposed[INPUTS * WIDTH];  // [in][out]
    multiply(inputs, 1, INPUTS, by_first, nullptr, transposed, INPUTS, FRAMES);
    transpose(transposed, gradient + W1, INPUTS, WIDTH);
    sum_rows(by_first, gradient + B1);
  }
};

Network<2> policy;
Network<1> critic;
constexpr int POLICY_SIZE = Network<2>::SIZE, SIZE = POLICY_SIZE + Network<1>::SIZE;

// The gradients of the loss by the outputs of both networks.
void loss_gradient(const float* logits, const float* values, const int64_t* actions,
                   const float* old_log_probs, const float* advantages, const float* targets,
                   const float* old_values, float* by_logits, float* by_values) {
  float mean = 0.f, variance = 0.f;
  for (int i = 0; i < FRAMES; i++) mean += advantages[i] / FRAMES;
  for (int i = 0; i < FRAMES; i++)
    variance += (advantages[i] - mean) * (advantages[i] - mean) / (FRAMES - 1);
  const float spread = std::sqrt(variance) + 1e-8f;
  for (int i = 0; i < FRAMES; i++) {
    const float advantage = (advantages[i] - mean) / spread;
    const float* logit = logits + 2 * i;
    const float largest = std::max(logit[0], logit[1]);
    const float normaliser =
        largest + std::log(std::exp(logit[0] - largest) + std::exp(logit[1] - largest));
    const float log_prob[2] = {logit[0] - normaliser, logit[1] - normaliser};
    const float prob[2] = {std::exp(log_prob[0]), std::exp(log_prob[1])};
    const float entropy = -(prob[0] * log_prob[0] + prob[1] * log_prob[1]);
    const float ratio = std::exp(log_prob[actions[i]] - old_log_probs[i]);
    const bool bounded = advantage > 0 ? ratio > 1 + CLIP : ratio < 1 - CLIP;
    const float by_log_prob = bounded ? 0.f : -advantage * ratio / FRAMES;
    for (int action = 0; action < 2; action++)
      by_logits[2 * i + action] =
          by_log_prob * ((action == actions[i]) - prob[action]) +
          ENTROPY_WEIGHT / FRAMES * prob[action] * (log_prob[action] + entropy);
    const float moved = values[i] - old_values[i];
    const float error = values[i] - targets[i];
    const float clipped = old_values[i] + std::min(std::max(moved, -CLIP), CLIP) - targets[i];
    const bool inside = std::abs(moved) <= CLIP;
    const float slope = inside || error * error > clipped * clipped ? error : 0.f;
    by_values[i] = VALUE_WEIGHT * slope / FRAMES;
  }
}

void clip_and_follow(float* weights, float* mean, float* square, float* gradient, int64_t step,
                     float learning_rate) {
  float norm = 0.f;
  for (int i = 0; i < SIZE; i++) norm += gradient[i] * gradient[i];
  const float share = std::min(1.f, MAX_NORM / (std::sqrt(norm) + 1e-6f));
  const float rate = learning_rate / (1 - std::pow(BETA_1, step));
  const float root = 1 / std::sqrt(1 - std::pow(BETA_2, step));
  for (int i = 0; i < SIZE; i++) {
    const float slope = gradient[i] * share;
    mean[i] = BETA_1 * mean[i] + (1 - BETA_1) * slope;
    square[i] = BETA_2 * square[i] + (1 - BETA_2) * slope * slope;
    weights[i] -= rate * mean[i] / (std::sqrt(square[i]) * root + EPSILON);
  }
}

}  // namespace

extern "C" int size() { return SIZE; }

// One gradient step, the `step`-th; `gradient` receives the clipped gradient's unclipped form.
extern "C" void gradient_step(float* weights, float* mean, float* square, float* gradient,
                              int64_t step, float learning_rate, const float* inputs,
                              const int64_t* actions, const float* old_log_probs,
                              const float* advantages, const float* targets,
                              const float* old_values) {
  static float logits[2 * FRAMES], values[FRAMES], by_logits[2 * FRAMES], by_values[FRAMES];
  policy.forward(weights, inputs, logits);
  critic.forward(weights + POLICY_SIZE, inputs, values);
  loss_gradient(logits, values, actions, old_log_probs, advantages, targets, old_values, by_logits,
                by_values);
  policy.backward(weights, inputs, by_logits, gradient);
  critic.backward(weights + POLICY_SIZE, inputs, by_values, gradient + POLICY_SIZE);
  clip_and_follow(weights, mean, square, gradient, step, learning_rate);
}
