// Draws a token from each row of logits without sorting a vocabulary.
//
// Every filter keeps a head of one order, larger logits first and lower ids first among equals, so what several of them
// keep together is the shortest head, told by its last member. A row is cut into blocks; a block whose largest logit lies
// beyond the head is not looked at again. The token drawn is the one at which the running sum of what is kept, by
// ascending id, passes the uniform number's share.
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "list.h"
#include "philox.h"
#include "team.h"

namespace {

constexpr double kColdest = 1e-5;   // dividing by less overflows
constexpr double kHottest = 1e30;   // the inverse of more is 0, and 0 times -infinity is no number
constexpr double kLargest = 1e30;   // where a penalized logit saturates, so that sums and differences stay finite
constexpr double kReach = 4;        // temperatures below the maximum where most nuclei end
constexpr double kFew = 1024;       // candidates looked at one by one
constexpr int kSorted = 32;         // and sorted

struct Candidate {
    float value;
    int32_t id;
};
bool ahead(const Candidate& a, const Candidate& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

constexpr Candidate kWhole{-INFINITY, INT32_MAX};  // the head that is everything

struct Free {
    void operator()(void* p) const { std::free(p); }
};
template <class T>
using Array = std::unique_ptr<T[], Free>;

template <class T>
Array<T> array_of(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return Array<T>(static_cast<T*>(std::aligned_alloc(64, bytes)));
}

float narrowed(double x) { return x < -static_cast<double>(FLT_MAX) ? -INFINITY : static_cast<float>(x); }

struct Ones {
    float block[kSampleBlock];
    Ones() { std::fill(block, block + kSampleBlock, 1.0f); }
};
const Ones kOnes;

// Two logits between which a measure of all that reach a logit passes a target: `inside` reach low, `above` reach high.
struct Bracket {
    float low, high;
    double inside, above;
};

// One thread's room, and the row it is at.
class RowSampler {
public:
    RowSampler(const SampleKernels& kernels, int32_t vocab)
        : kernels_(kernels), vocab_(vocab), blocks_((vocab + kSampleBlock - 1) / kSampleBlock), adjusted_(array_of<float>(vocab)),
          weights_(array_of<float>(vocab)), tops_(array_of<float>(2 * int64_t{blocks_})), sums_(array_of<double>(blocks_)),
          found_(array_of<Candidate>(vocab + int64_t{1})), seen_(array_of<bool>(vocab)) {
        if (seen_) std::fill(seen_.get(), seen_.get() + vocab, false);
    }

    bool allocated() const { return adjusted_ && weights_ && tops_ && sums_ && found_ && seen_; }

    // The token, or -1; logprobs and top_ids as qk_sampler_run has them.
    int32_t sample(const float* logits, const SampleRow& how, double* logprobs, int32_t* top_ids) {
        if (!look(logits)) return -1;
        const double top = top_;
        double log_sum = 0;
        if (how.logprobs >= 0) log_sum = likeliest(how.logprobs, logprobs + 1, top_ids);
        if (how.biases || how.length || how.bans) {
            adjust(logits, how);
            if (!look(adjusted_.get())) return -1;
        }
        const int32_t token = how.temperature < kColdest ? first_highest() : draw(how);
        if (how.logprobs >= 0) logprobs[0] = (logits[token] - top) - log_sum;
        return token;
    }

private:
    int32_t count_of(int block) const { return std::min(kSampleBlock, vocab_ - block * kSampleBlock); }
    const float* logits_of(int block) const { return row_ + block * kSampleBlock; }
    float* weights_of(int block) const { return weights_.get() + block * kSampleBlock; }

    // Makes `row` the one at hand; false where it has no largest finite logit.
    bool look(const float* row) {
        row_ = row;
        floor_ = -INFINITY;
        top_ = kernels_.highest(row, vocab_, tops_.get());
        return std::isfinite(top_);
    }

    int32_t first_highest() const {
        int block = 0;
        while (tops_[block] != top_) ++block;
        const float* x = logits_of(block);
        int32_t at = 0;
        while (x[at] != top_) ++at;
        return block * kSampleBlock + at;
    }

    void adjust(const float* logits, const SampleRow& how) {
        float* x = adjusted_.get();
        std::copy(logits, logits + vocab_, x);
        for (int32_t i = 0; i < how.biases; ++i) x[how.bias_ids[i]] += how.bias[i];
        if (how.repetition != 1.0) {
            each_once(how.tokens, how.tokens + how.length, [&](int32_t token) {
                const double value = x[token], penalized = value > 0 ? value / how.repetition : value * how.repetition;
                if (x[token] != -INFINITY) x[token] = static_cast<float>(std::clamp(penalized, -kLargest, kLargest));
            });
        }
        const int32_t *written = how.tokens + how.prompt, *end = how.tokens + how.length;
        if (how.presence != 0.0f) each_once(written, end, [&](int32_t token) { x[token] -= how.presence; });
        if (how.frequency != 0.0f) std::for_each(written, end, [&](int32_t token) { x[token] -= how.frequency; });
        for (int32_t i = 0; i < how.bans; ++i) x[how.banned[i]] = -INFINITY;
    }

    template <class Fn>
    void each_once(const int32_t* first, const int32_t* last, const Fn& f) {
        for (const int32_t* token = first; token != last; ++token) {
            if (seen_[*token]) continue;
            seen_[*token] = true;
            f(*token);
        }
        for (const int32_t* token = first; token != last; ++token) seen_[*token] = false;
    }

    // The likeliest tokens and their log probabilities. Returns the logarithm of the sum of exp(x - top).
    double likeliest(int32_t count, double* logprobs, int32_t* ids) {
        weigh(1.0f, kWhole);
        const double log_sum = std::log(mass(-INFINITY));
        count = std::min(count, vocab_);
        if (count > 0) head(count);
        std::sort(found_.get(), found_.get() + count, ahead);
        for (int32_t i = 0; i < count; ++i) {
            ids[i] = found_[i].id;
            logprobs[i] = (static_cast<double>(found_[i].value) - top_) - log_sum;
        }
        return log_sum;
    }

    // Candidates low <= x < high into found_, by id.
    int32_t collect(float low, float high) {
        int32_t count = 0;
        for (int block = 0; block < blocks_; ++block) {
            if (tops_[block] < low) continue;
            const float* x = logits_of(block);
            for (int32_t i = 0, size = count_of(block); i < size; ++i) {
                found_[count] = {x[i], block * kSampleBlock + i};
                count += x[i] >= low && x[i] < high;
            }
        }
        return count;
    }

    // Puts the first `count` of the order at the front of found_, its last member at their end.
    Candidate head(int32_t count) {
        const float floor = count <= blocks_ ? nth_top(count) : below_head(count);
        Candidate* found = found_.get();
        const int32_t fit = collect(floor, INFINITY);
        std::nth_element(found, found + count - 1, found + fit, ahead);
        return found[count - 1];
    }

    // So many blocks hold a logit that reaches it.
    float nth_top(int32_t count) {
        float* tops = tops_.get() + blocks_;
        std::copy(tops_.get(), tops, tops);
        std::nth_element(tops, tops + count - 1, tops + blocks_, std::greater<float>());
        return tops[count - 1];
    }

    // A logit that at least `count` reach and hardly more.
    float below_head(int32_t count) const {
        const auto reached = [this](float limit) {
            double sum = 0;
            for (int block = 0; block < blocks_; ++block) {
                if (tops_[block] >= limit) sum += kernels_.mass(logits_of(block), kOnes.block, count_of(block), limit);
            }
            return sum;
        };
        const double spread = static_cast<double>(top_) - *std::min_element(tops_.get(), tops_.get() + blocks_);
        return bracket(count, std::max(spread, kColdest), reached, [](const Bracket& at) { return at.inside - at.above; }).low;
    }

    // measure(limit) falls as limit rises; members(bracket): how many candidates it holds at most.
    template <class Measure, class Members>
    Bracket bracket(double target, double reach, const Measure& measure, const Members& members) const {
        Bracket at{top_, INFINITY, measure(top_), 0};
        for (; at.inside < target; reach *= 2) {
            const float low = std::max(narrowed(top_ - reach), floor_);
            at = {low, at.low, measure(low), at.inside};
        }
        while (members(at) > kFew) {
            const auto middle = static_cast<float>((static_cast<double>(at.low) + std::min(at.high, top_)) / 2);
            if (!(middle > at.low && middle < at.high)) break;
            const double inside = measure(middle);
            if (inside >= target) {
                at.low = middle;
                at.inside = inside;
            } else {
                at.high = middle;
                at.above = inside;
            }
        }
        return at;
    }

    // What a block's logits must reach to be kept: where equals are cut by id, those of later blocks must exceed it.
    static float limit_in(int block, const Candidate& last) {
        return block <= last.id / kSampleBlock ? last.value : std::nextafter(last.value, INFINITY);
    }

    // And in the block itself, the equals behind it lose their weights.
    void drop_equals(const Candidate& last) {
        if (last.id >= vocab_) return;
        const int block = last.id / kSampleBlock;
        const float* x = logits_of(block);
        for (int32_t i = last.id % kSampleBlock + 1; i < count_of(block); ++i) {
            if (x[i] == last.value) weights_of(block)[i] = 0;
        }
    }

    void weigh(float rate, const Candidate& last) {
        floor_ = last.value;
        for (int block = 0; block < blocks_; ++block) {
            if (tops_[block] < floor_) continue;
            kernels_.weigh(logits_of(block), count_of(block), top_, rate, limit_in(block, last), weights_of(block));
        }
        drop_equals(last);
    }

    // Of what is weighed, the part whose logits reach `limit`. Falls in steps as that rises: lanes are added in one
    // order, only fewer of them.
    double mass(float limit) const {
        double sum = 0;
        const float reached = std::max(limit, floor_);
        for (int block = 0; block < blocks_; ++block) {
            if (tops_[block] >= reached) sum += kernels_.mass(logits_of(block), weights_of(block), count_of(block), limit);
        }
        return sum;
    }

    // The last of the shortest head whose weights reach `target`: a bracket with few candidates, then quickselect.
    Candidate nucleus(double target, double temperature) {
        const Bracket at = bracket(target, kReach * temperature, [this](float limit) { return mass(limit); }, [&](const Bracket& b) {
            return (b.inside - b.above) * std::exp((static_cast<double>(top_) - b.low) / temperature);
        });
        double above = at.above;
        Candidate *first = found_.get(), *last = first + collect(at.low, at.high);
        while (last - first > kSorted) {
            Candidate* middle = first + (last - first) / 2;
            std::nth_element(first, middle, last, ahead);
            double heavier = above;
            for (const Candidate* c = first; c != middle; ++c) heavier += weights_[c->id];
            if (heavier >= target) {
                last = middle;
            } else {
                above = heavier;
                first = middle;
            }
        }
        std::sort(first, last, ahead);
        while (first + 1 < last && (above += weights_[first->id]) < target) ++first;
        return *first;
    }

    int32_t draw(const SampleRow& how) {
        const double temperature = std::min(how.temperature, kHottest);
        Candidate last = kWhole;
        const auto shorten = [&last](const Candidate& other) {
            if (ahead(other, last)) last = other;
        };
        const auto drop_unlikely = [&] {
            if (how.min_p <= 0) return;
            const double floor = top_ + temperature * std::log(how.min_p);
            float limit = narrowed(floor);
            if (limit < floor) limit = std::nextafter(limit, INFINITY);
            shorten({limit, INT32_MAX});
        };
        if (how.top_k > 0 && how.top_k < vocab_) last = head(how.top_k);
        if (how.top_p >= 1.0) drop_unlikely();
        weigh(static_cast<float>(1.0 / temperature), last);
        if (how.top_p < 1.0) {
            shorten(nucleus(how.top_p * mass(-INFINITY), temperature));
            drop_unlikely();
            drop_equals(last);
        }
        return invert(last, uniform(how.seed, how.position));
    }

    int32_t invert(const Candidate& last, double share) {
        double total = 0;
        for (int block = 0; block < blocks_; ++block) {
            const bool kept = tops_[block] >= last.value;
            sums_[block] = kept ? kernels_.mass(logits_of(block), weights_of(block), count_of(block), limit_in(block, last)) : 0;
            total += sums_[block];
        }
        const double target = share * total;
        double before = 0;
        int block = 0;
        while (before + sums_[block] <= target) before += sums_[block++];
        const float *x = logits_of(block), *w = weights_of(block), limit = limit_in(block, last);
        int32_t token = 0;
        for (int32_t i = 0; i < count_of(block) && before <= target; ++i) {  // the last one where rounding leaves a rest
            if (x[i] < limit || w[i] == 0) continue;
            before += w[i];
            token = block * kSampleBlock + i;
        }
        return token;
    }

    const SampleKernels& kernels_;
    const int32_t vocab_, blocks_;
    const float* row_ = nullptr;
    float top_ = 0;
    float floor_ = 0;        // blocks that do not reach it have no weights
    Array<float> adjusted_;
    Array<float> weights_;
    Array<float> tops_;      // of each block, then room for as many
    Array<double> sums_;     // of each block
    Array<Candidate> found_;
    Array<bool> seen_;       // all false between rows
};

bool in_vocabulary(const char* what, int32_t row, const int32_t* ids, int32_t count, int32_t vocab) {
    for (int32_t i = 0; i < count; ++i) {
        if (ids[i] >= 0 && ids[i] < vocab) continue;
        last_error = "row " + std::to_string(row) + ": " + what + " " + std::to_string(ids[i]) + " is outside the vocabulary of " + std::to_string(vocab);
        return false;
    }
    return true;
}

struct Step {
    Sampler* sampler;
    const float* logits;
    const SampleRow* rows;
    int32_t most;
    int32_t* tokens;
    double* logprobs;
    int32_t* top_ids;
    static void run(void* context, int32_t, int32_t row, int32_t thread);
};

}  // namespace

struct Sampler {
    int32_t vocab, threads;
    std::vector<std::unique_ptr<RowSampler>> rooms;  // by thread
};

void Step::run(void* context, int32_t, int32_t row, int32_t thread) {
    const Step& step = *static_cast<Step*>(context);
    const int64_t at = row;
    double* logprobs = step.logprobs ? step.logprobs + at * (step.most + 1) : nullptr;
    int32_t* top_ids = step.top_ids ? step.top_ids + at * step.most : nullptr;
    step.tokens[row] = step.sampler->rooms[thread]->sample(step.logits + at * step.sampler->vocab, step.rows[row], logprobs, top_ids);
}

QK_API Sampler* qk_sampler_create(int32_t vocab, int32_t isa, int32_t threads) {
    const KernelSet* kernels = kernels_of(isa);
    if (!kernels || threads < 1 || vocab < 1) {
        last_error = !kernels ? "this processor cannot run the instruction set asked for" : "a sampler needs at least one thread and one token";
        return nullptr;
    }
    auto sampler = std::make_unique<Sampler>();
    sampler->vocab = vocab;
    sampler->threads = threads;
    for (int32_t thread = 0; thread < threads; ++thread) {
        sampler->rooms.push_back(std::make_unique<RowSampler>(kernels->sample, vocab));
        if (sampler->rooms.back()->allocated()) continue;
        last_error = "out of memory for the threads' scratch";
        return nullptr;
    }
    return sampler.release();
}

QK_API void qk_sampler_destroy(Sampler* sampler) { delete sampler; }

QK_API int32_t qk_sampler_run(Sampler* sampler, const float* logits, const SampleRow* rows, int32_t count, int32_t most,
                              int32_t* tokens, double* logprobs, int32_t* top_ids) {
    for (int32_t row = 0; row < count; ++row) {
        const SampleRow& how = rows[row];
        if (!in_vocabulary("biased token", row, how.bias_ids, how.biases, sampler->vocab) ||
            !in_vocabulary("token", row, how.tokens, how.length, sampler->vocab) ||
            !in_vocabulary("banned token", row, how.banned, how.bans, sampler->vocab)) {
            return 1;
        }
    }
    Step step{sampler, logits, rows, most, tokens, logprobs, top_ids};
    // One row is not worth a wake-up.
    Team::of(count > 1 ? sampler->threads : 1).run({&count, 1, &Step::run, &step});
    return 0;
}
