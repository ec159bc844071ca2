/* A list of operations on small tensors, played for one client after another, so that what passes between them stays
   in the nearest cache.

   Every operand is a buffer: an address and how many bytes the next client is further on, 0 for what all clients share
   and for scratch memory. An operation is a row of COLUMNS whole numbers. */

#include <math.h>

enum { PRODUCT, RELU, MASK, SOFTMAX, PICK, PUT, ADD, SUBTRACT, MULTIPLY, DIVIDE, SUM, MEAN, AT_LEAST, FILL };
enum {
  KIND, OUT, A, B, C, ROWS, LENGTH, DEPTH, A_ROW, A_NEXT, B_ROW, B_NEXT, OUT_ROW, C_ROW, START, NUMBER, THEN, COLUMNS
};
enum { FROM_NOTHING, FROM_BIAS, FROM_OUT };
/* Products are no deeper. */
#define DEEPEST 1024

typedef WHOLE bits __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

/* max(0, v); what is not a number stays. */
INLINE vector rectified(vector v) { return (vector)((bits)v & ~(bits)(v < 0)); }

/* `many` rows of out = start + by * a b, `wide` vectors of columns. */
INLINE void some_rows(const int many, const int wide, REAL *out, const REAL *a, const REAL *b, const REAL *bias,
                      const long *op, REAL by) {
  vector sum[5][4];
  for (int i = 0; i < many; i++)
    for (int j = 0; j < wide; j++) sum[i][j] = (vector){0};
  for (long k = 0; k < op[DEPTH]; k++) {
    vector row[4];
    for (int j = 0; j < wide; j++) row[j] = AT(b + k * op[B_ROW] + j * LANES);
    for (int i = 0; i < many; i++) {
      const REAL factor = a[i * op[A_ROW] + k * op[A_NEXT]];
      for (int j = 0; j < wide; j++) sum[i][j] += row[j] * factor;
    }
  }
  for (int i = 0; i < many; i++)
    for (int j = 0; j < wide; j++) {
      vector *to = (vector *)(out + i * op[OUT_ROW] + j * LANES);
      vector result = sum[i][j] * by;
      if (op[START] == FROM_BIAS) result += AT(bias + i * op[C_ROW] + j * LANES);
      if (op[START] == FROM_OUT) result += *to;
      *to = op[THEN] ? rectified(result) : result;
    }
}

INLINE void columns(const int wide, REAL *out, const REAL *a, const REAL *b, const REAL *bias, const long *op,
                    REAL by) {
#define SOME(many) \
  some_rows(many, wide, out + i * op[OUT_ROW], a + i * op[A_ROW], b, bias + i * op[C_ROW], op, by)
  long i = 0;
  for (; i + 5 <= op[ROWS]; i += 5) SOME(5);
  switch (op[ROWS] - i) {
  case 4: SOME(4); break;
  case 3: SOME(3); break;
  case 2: SOME(2); break;
  case 1: SOME(1); break;
  }
}

/* Fewer columns than a vector has, or columns that lie apart: b's are laid side by side first. */
static void narrow(long many, REAL *out, const REAL *a, const REAL *b, const REAL *bias, const long *op, REAL by) {
  REAL packed[DEEPEST * LANES], start[LANES] = {0}, made[5 * LANES];
  long as_packed[COLUMNS];
  memcpy(as_packed, op, sizeof(as_packed));
  as_packed[B_ROW] = as_packed[OUT_ROW] = LANES, as_packed[START] = FROM_NOTHING;
  as_packed[C_ROW] = as_packed[THEN] = 0;
  for (long k = 0; k < op[DEPTH]; k++)
    for (long n = many; n < LANES; n++) packed[k * LANES + n] = 0;
  for (long n = 0; n < many; n++)
    for (long k = 0; k < op[DEPTH]; k++) packed[k * LANES + n] = b[k * op[B_ROW] + n * op[B_NEXT]];
  for (long first = 0; first < op[ROWS]; first += 5) {
    as_packed[ROWS] = op[ROWS] - first < 5 ? op[ROWS] - first : 5;
    columns(1, made, a + first * op[A_ROW], packed, start, as_packed, by);
    for (long i = first; i < first + as_packed[ROWS]; i++)
      for (long n = 0; n < many; n++) {
        REAL *to = out + i * op[OUT_ROW] + n, result = made[(i - first) * LANES + n];
        if (op[START] == FROM_BIAS) result += bias[i * op[C_ROW] + n];
        if (op[START] == FROM_OUT) result += *to;
        *to = op[THEN] && result < 0 ? 0 : result;
      }
  }
}

#if VECTOR_BYTES == 64
typedef REAL half __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));
#endif

/* The sum of a vector's numbers, by halves. */
INLINE REAL total_of(vector v) {
#if VECTOR_BYTES == 64
  half pair = *(half *)&v + *((half *)&v + 1);
  small sum = *(small *)&pair + *((small *)&pair + 1);
#elif VECTOR_BYTES == 32
  small sum = *(small *)&v + *((small *)&v + 1);
#else
  small sum = v;
#endif
  REAL total = sum[0];
  for (int lane = 1; lane < SMALL; lane++) total += sum[lane];
  return total;
}

/* A few rows and columns of a product whose factors both lie side by side along the depth. */
INLINE void some_sums(const int rows, const int many, REAL *out, const REAL *a, const REAL *b, const REAL *bias,
                      const long *op, REAL by) {
  vector sum[2][5];
  for (int i = 0; i < rows; i++)
    for (int n = 0; n < many; n++) sum[i][n] = (vector){0};
  for (long k = 0; k < op[DEPTH]; k += LANES)
    for (int n = 0; n < many; n++) {
      const vector column = AT(b + n * op[B_NEXT] + k);
      for (int i = 0; i < rows; i++) sum[i][n] += AT(a + i * op[A_ROW] + k) * column;
    }
  for (int i = 0; i < rows; i++)
    for (int n = 0; n < many; n++) {
      REAL *to = out + i * op[OUT_ROW] + n, result = total_of(sum[i][n]) * by;
      if (op[START] == FROM_BIAS) result += bias[i * op[C_ROW] + n];
      if (op[START] == FROM_OUT) result += *to;
      *to = op[THEN] && result < 0 ? 0 : result;
    }
}

static void sums(REAL *out, const REAL *a, const REAL *b, const REAL *bias, const long *op, REAL by) {
#define PART(rows, many)                                                                       \
  some_sums(rows, many, out + i * op[OUT_ROW] + n, a + i * op[A_ROW], b + n * op[B_NEXT],      \
            bias + i * op[C_ROW] + n, op, by)
  long i = 0;
  for (; i + 2 <= op[ROWS]; i += 2) {
    long n = 0;
    for (; n + 5 <= op[LENGTH]; n += 5) PART(2, 5);
    for (; n < op[LENGTH]; n++) PART(2, 1);
  }
  if (i < op[ROWS])
    for (long n = 0; n < op[LENGTH]; n++) PART(1, 1);
}

static void product(REAL *out, const REAL *a, const REAL *b, const REAL *bias, const long *op, REAL by) {
  long j = 0;
  if (op[B_ROW] == 1 && op[A_NEXT] == 1 && op[B_NEXT] != 1 && op[DEPTH] % LANES == 0) {
    sums(out, a, b, bias, op, by);
    return;
  }
  if (op[B_NEXT] == 1) {
    for (; j + 4 * LANES <= op[LENGTH]; j += 4 * LANES) columns(4, out + j, a, b + j, bias + j, op, by);
    for (; j + LANES <= op[LENGTH]; j += LANES) columns(1, out + j, a, b + j, bias + j, op, by);
  }
  for (; j < op[LENGTH]; j += LANES)
    narrow(op[LENGTH] - j < LANES ? op[LENGTH] - j : LANES, out + j, a, b + j * op[B_NEXT], bias + j, op, by);
}

#ifdef DOUBLE
INLINE void exponentials(REAL *to, long count) {
  for (long n = 0; n < count; n++) to[n] = exp(to[n]);
}
#else
/* exp(x) for x <= 0, which is 2^n exp(r) with |r| <= log(2) / 2, and exp(r) by a polynomial (Cephes); within two units
   of the last place, 0 below -87. What is not a number stays. */
INLINE vector exponential(vector x) {
  const vector least = (vector){0} - 87.0f, magic = (vector){0} + 12582912.0f;
  const bits tiny = (bits)(x < least), odd = (bits)(x != x);
  const vector near = (vector)((bits)x & ~tiny & ~odd);
  const vector n = (near * 1.44269504088896341f + magic) - magic;
  const vector r = near - n * 0.693359375f - n * -2.12194440e-4f;
  vector sum = (vector){0} + 1.9875691500e-4f;
  sum = sum * r + 1.3981999507e-3f;
  sum = sum * r + 8.3334519073e-3f;
  sum = sum * r + 4.1665795894e-2f;
  sum = sum * r + 1.6666665459e-1f;
  sum = sum * r + 5.0000001201e-1f;
  sum = sum * r * r + r + 1.0f;
  const bits power = (__builtin_convertvector(n, bits) + 127) << 23;
  const vector result = sum * (vector)power;
  return (vector)(((bits)result & ~tiny & ~odd) | ((bits)x & odd));
}

INLINE void exponentials(REAL *to, long count) {
  REAL some[LANES];
  long n = 0;
  for (; n + LANES <= count; n += LANES) *(vector *)(to + n) = exponential(AT(to + n));
  if (n == count) return;
  memset(some, 0, sizeof(some));
  memcpy(some, to + n, (size_t)(count - n) * sizeof(REAL));
  *(vector *)some = exponential(AT(some));
  memcpy(to + n, some, (size_t)(count - n) * sizeof(REAL));
}
#endif

/* log of the sum of exp(a), a row at a time, and exp(a) over that sum. */
static void softmax(REAL *logs, const REAL *a, REAL *shares, const long *op) {
  const long rows = op[ROWS], length = op[LENGTH];
  for (long i = 0; i < rows; i++) {
    const REAL *from = a + i * op[A_ROW];
    REAL *to = shares + i * length, top = from[0];
    for (long n = 1; n < length; n++) top = from[n] > top ? from[n] : top;
    for (long n = 0; n < length; n++) to[n] = from[n] - top;
    logs[i] = top;
  }
  exponentials(shares, rows * length);
  for (long i = 0; i < rows; i++) {
    REAL *to = shares + i * length, total = 0;
    for (long n = 0; n < length; n++) total += to[n];
    const REAL by = 1 / total;
    for (long n = 0; n < length; n++) to[n] *= by;
    logs[i] += (REAL)LOG(total);
  }
}

#define EACH(what)                                                                             \
  for (long i = 0; i < op[ROWS]; i++)                                                          \
    for (long n = 0; n < op[LENGTH]; n++) {                                                    \
      const REAL x = a[i * op[A_ROW] + n * op[A_NEXT]], y = b[i * op[B_ROW] + n * op[B_NEXT]]; \
      out[i * op[OUT_ROW] + n] = what;                                                         \
    }                                                                                          \
  break

enum { DONE, UNKNOWN, OUT_OF_RANGE };

/* A client's part of a sum. Both functions below add in the same order, to the same bits. */
INLINE void add_share(REAL *sum, REAL share, REAL value) { *sum += share * value; }

/* Numbers of a sum that stay in the nearest cache. */
#define AT_ONCE 2048

/* The sum over all clients of p v; values has a row of `numbers` for each of them. */
int weighted_sum(REAL *sum, const REAL *values, const double *shares, long clients, long numbers) {
  for (long first = 0; first < numbers; first += AT_ONCE) {
    const long end = first + AT_ONCE < numbers ? first + AT_ONCE : numbers;
    for (long i = first; i < end; i++) sum[i] = 0;
    for (long client = 0; client < clients; client++) {
      const REAL *of_client = values + client * numbers, share = (REAL)shares[client];
      for (long i = first; i < end; i++) add_share(sum + i, share, of_client[i]);
    }
  }
  return DONE;
}

/* The operations of one step of one client. `here` has an address for every buffer, `advances` how many bytes the next
   client is further on. */
static int step_of(long client, const long *ops, long count, char *const *here, const long *advances,
                   const double *numbers) {
  for (const long *op = ops; op < ops + count * COLUMNS; op += COLUMNS) {
#define BUFFER(which) (here[op[which]] + client * advances[op[which]])
    REAL *out = (REAL *)BUFFER(OUT), *c = (REAL *)BUFFER(C);
    const REAL *a = (const REAL *)BUFFER(A), *b = (const REAL *)BUFFER(B);
    const int64_t *index = (const int64_t *)b;
    const long all = op[ROWS] * op[LENGTH];
    REAL total = 0;
    switch (op[KIND]) {
    case PRODUCT: product(out, a, b, c, op, (REAL)numbers[op[NUMBER]]); break;
    case RELU:
      for (long i = 0; i < all; i++) out[i] = a[i] < 0 ? 0 : a[i];
      break;
    case MASK:
      for (long i = 0; i < all; i++) out[i] = b[i] <= 0 ? 0 : a[i];
      break;
    case SOFTMAX: softmax(out, a, c, op); break;
    case PICK:
    case PUT:
      for (long i = 0; i < op[ROWS]; i++) {
        const int64_t at = index[i * op[B_ROW]];
        if (at < 0 || at >= op[LENGTH]) return OUT_OF_RANGE;
        if (op[KIND] == PICK) out[i] = a[i * op[A_ROW] + at];
        else out[i * op[OUT_ROW] + at] += c[i * op[C_ROW]];
      }
      break;
    case ADD: EACH(x + y);
    case SUBTRACT: EACH(x - y);
    case MULTIPLY: EACH(x *y);
    case DIVIDE: EACH(x / y);
    case SUM:
    case MEAN:
      for (long i = 0; i < op[ROWS]; i++) {
        total = 0;
        for (long n = 0; n < op[LENGTH]; n++) total += a[i * op[A_ROW] + n * op[A_NEXT]];
        out[i] = op[KIND] == SUM ? total : total / (REAL)op[LENGTH];
      }
      break;
    case AT_LEAST:
      for (long i = 0; i < all; i++) out[i] = a[i] < (REAL)numbers[op[NUMBER]] ? (REAL)numbers[op[NUMBER]] : a[i];
      break;
    case FILL:
      for (long i = 0; i < op[ROWS]; i++)
        for (long n = 0; n < op[LENGTH]; n++) {
          const char here = ((const char *)b)[i * op[B_ROW] + n * op[B_NEXT]];
          out[i * op[OUT_ROW] + n] = here ? (REAL)numbers[op[NUMBER]] : a[i * op[A_ROW] + n * op[A_NEXT]];
        }
      break;
    default: return UNKNOWN;
    }
  }
  return DONE;
}

/* All steps of one client, then of the next; `buffers` has a row of `width` addresses for every step. */
int play(const long *ops, long count, char *const *buffers, long width, const long *advances, const double *numbers,
         long clients, long steps) {
  for (long client = 0; client < clients; client++)
    for (long step = 0; step < steps; step++) {
      const int failed = step_of(client, ops, count, buffers + step * width, advances, numbers);
      if (failed) return failed;
    }
  return DONE;
}

/* A kind of step: its operations, how many, the advances of its buffers, its numbers; all whole numbers or addresses. */
enum { OPERATIONS, COUNT, ADVANCES, FACTORS, PROGRAM };
/* A step: its kind, and its row of buffers. */
enum { WHICH, BUFFERS, STEP };
/* What is summed up: where a client changes it, what it starts from, the sum of p (end - start), how many numbers. */
enum { CHANGED, FROM, TOTAL, NUMBERS, SUMMED };

/* The same with a number of steps for each client, who all use one place after another; what they change is summed up
   with their `shares`. */
int play_summed(const long *programs, const long *steps, const long *ends, long clients, const long *summed, long sums,
                const double *shares) {
  for (long client = 0; client < clients; client++) {
    for (const long *one = summed; one < summed + sums * SUMMED; one += SUMMED)
      memcpy((char *)one[CHANGED], (const char *)one[FROM], (size_t)one[NUMBERS] * sizeof(REAL));
    for (const long *step = steps; step < steps + ends[client] * STEP; step += STEP) {
      const long *program = programs + step[WHICH] * PROGRAM;
      const int failed = step_of(client, (const long *)program[OPERATIONS], program[COUNT], (char *const *)step[BUFFERS],
                                 (const long *)program[ADVANCES], (const double *)program[FACTORS]);
      if (failed) return failed;
    }
    for (const long *one = summed; one < summed + sums * SUMMED; one += SUMMED) {
      const REAL *end = (const REAL *)one[CHANGED], *start = (const REAL *)one[FROM], share = (REAL)shares[client];
      REAL *sum = (REAL *)one[TOTAL];
      for (long i = 0; i < one[NUMBERS]; i++) add_share(sum + i, share, end[i] - start[i]);
    }
  }
  return DONE;
}
