"""Views and plots of what the library measures; they measure nothing themselves.

``show_*`` give circuitsvis views (:class:`~tl_spd.views.view.View`, with ``save``), ``plot_*`` matplotlib or plotly
figures (the extra ``plots``).
"""

from tl_spd.views.attention import show_attention as show_attention
from tl_spd.views.figures import plot_active_by_position as plot_active_by_position
from tl_spd.views.figures import plot_history as plot_history
from tl_spd.views.figures import plot_rank1_curve as plot_rank1_curve
from tl_spd.views.figures import plot_suppression as plot_suppression
from tl_spd.views.figures import plot_target as plot_target
from tl_spd.views.figures import plot_trace as plot_trace
from tl_spd.views.figures import plot_zero_out as plot_zero_out
from tl_spd.views.interactive import plot_importance as plot_importance
from tl_spd.views.interactive import plot_patching as plot_patching
from tl_spd.views.tokens import show_active as show_active
from tl_spd.views.tokens import show_importance as show_importance
from tl_spd.views.tokens import show_top_examples as show_top_examples
from tl_spd.views.tokens import show_vocabulary as show_vocabulary
from tl_spd.views.view import Panel as Panel
from tl_spd.views.view import View as View
from tl_spd.views.view import document as document
