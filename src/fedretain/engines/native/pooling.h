/* The maximum over windows of 2 x 2 REAL numbers, PAIRS of windows at a time, and where it was. The first of equal
   numbers counts, in reading order. A place is 0 or -1 (the upper row), -2 or -3 (the lower one), even or odd for the
   left and the right column. A number that is none (NaN) is passed on.

   `rows` are pairs of rows, `half` is half their width and at least PAIRS. */

#ifdef DOUBLE
#define PAIRS 2
#define EVEN 0, 2
#define ODD 1, 3
#define FIRST 0, 2
#define SECOND 1, 3
#else
#define PAIRS 4
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#define FIRST 0, 4, 1, 5
#define SECOND 2, 6, 3, 7
#endif

typedef REAL reals __attribute__((vector_size(PAIRS * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
typedef WHOLE wholes __attribute__((vector_size(PAIRS * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
#define CHOOSE(which, one, other) (reals)(((which) & (wholes)(one)) | (~(which) & (wholes)(other)))
/* Larger than what came before it, or no number. */
#define AFTER(one, other) (~((one) <= (other)) & ((other) == (other)))

INLINE void largest(const REAL *upper, const REAL *lower, REAL *out, WHOLE *place) {
  const reals u0 = *(const reals *)upper, u1 = *(const reals *)(upper + PAIRS);
  const reals l0 = *(const reals *)lower, l1 = *(const reals *)(lower + PAIRS);
  const reals a = __builtin_shufflevector(u0, u1, EVEN), b = __builtin_shufflevector(u0, u1, ODD);
  const reals c = __builtin_shufflevector(l0, l1, EVEN), d = __builtin_shufflevector(l0, l1, ODD);
  const wholes right = AFTER(b, a), lower_right = AFTER(d, c);
  const reals above = CHOOSE(right, b, a), below = CHOOSE(lower_right, d, c);
  const wholes down = AFTER(below, above);
  *(reals *)out = CHOOSE(down, below, above);
  *(wholes *)place = (down & (lower_right - 2)) | (~down & right);
}

INLINE void spread(const REAL *gradient, const WHOLE *place, REAL *upper, REAL *lower) {
  const wholes value = *(const wholes *)gradient, where = *(const wholes *)place;
  const wholes a = value & (where == 0), b = value & (where == -1);
  const wholes c = value & (where == -2), d = value & (where == -3);
  *(wholes *)upper = __builtin_shufflevector(a, b, FIRST);
  *(wholes *)(upper + PAIRS) = __builtin_shufflevector(a, b, SECOND);
  *(wholes *)lower = __builtin_shufflevector(c, d, FIRST);
  *(wholes *)(lower + PAIRS) = __builtin_shufflevector(c, d, SECOND);
}

int pool(const REAL *maps, REAL *out, WHOLE *place, long rows, long half) {
  for (long r = 0; r < rows; r++, maps += 4 * half, out += half, place += half) {
    for (long i = 0; i + PAIRS <= half; i += PAIRS) largest(maps + 2 * i, maps + 2 * (half + i), out + i, place + i);
    const long i = half - PAIRS; /* overlaps what is there already */
    largest(maps + 2 * i, maps + 2 * (half + i), out + i, place + i);
  }
  return 0;
}

int pool_gradient(const REAL *gradient, const WHOLE *place, REAL *out, long rows, long half) {
  for (long r = 0; r < rows; r++, out += 4 * half, gradient += half, place += half) {
    for (long i = 0; i + PAIRS <= half; i += PAIRS)
      spread(gradient + i, place + i, out + 2 * i, out + 2 * (half + i));
    const long i = half - PAIRS;
    spread(gradient + i, place + i, out + 2 * i, out + 2 * (half + i));
  }
  return 0;
}
